"""vLLM's CPU worker with the runtime of a KV policy; apart, because its base module is for CPU builds only."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvplug.worker.worker import PolicyWorkerMixin


class PolicyCPUWorker(PolicyWorkerMixin, CPUWorker):
    """For CPU wheels."""
