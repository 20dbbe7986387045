"""Oracle: keep what the model turned out to need, scored beforehand prompt by prompt. For evaluation only.

A scorer that guesses such scores can be compared with the scores themselves, at the same budget. Files of scores are
computed by `vllm_kvplug.eval.oracle`; a request names its own with `kvplug.scores`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open

from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.components.allocators import even_parts, top_shared
from vllm_kvplug.config import CONFIG_FLAG, AllocationKnob, PolicyConfig, explain, share_of
from vllm_kvplug.cuts import Cuts
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.files import Frozen, write_safetensors
from vllm_kvplug.options import OptionError
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Policy, PromptView
from vllm_kvplug.shape import ModelShape

Kind = Literal["kvzip", "answer"]
METADATA, SCORES = "kvplug_scores", "scores"


# ---------------------------------------------------------------- a prompt's scores as a file
class ScoresMetadata(Frozen):
    """Whose scores a file holds, and how they were computed."""

    version: Literal[1] = 1
    kind: Kind
    model: ProfiledModel


def scores_name(token_ids: Sequence[int]) -> str:
    """The value of `kvplug.scores` for a whole prompt: a hash of its token ids."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()


def scores_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def save_scores(folder: Path, token_ids: Sequence[int], scores: torch.Tensor, metadata: ScoresMetadata) -> None:
    """Write scores, float16 or float32 [layers, KV heads, tokens], of the first tokens of the prompt `token_ids`."""
    path = scores_path(folder, scores_name(token_ids))
    write_safetensors(path, {SCORES: scores}, {METADATA: metadata.model_dump_json()})


@lru_cache(maxsize=32)
def load_scores(folder: Path, name: str, shape: ModelShape) -> torch.Tensor:
    """float32 [layers, KV heads, tokens], finite, on the CPU; not to be changed.

    Raises OptionError if there is no such file, or it is not one for a model of this shape.
    """
    path = scores_path(folder, name)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = ScoresMetadata.model_validate_json((file.metadata() or {}).get(METADATA, ""))
            scores = file.get_tensor(SCORES)
    except FileNotFoundError:
        raise OptionError(f"kvplug.scores: there is no {path}") from None
    except (OSError, SafetensorError, ValueError) as error:
        reason = explain(error) if isinstance(error, ValidationError) else error
        raise OptionError(f"kvplug.scores: {path} is no file of scores: {reason}") from None
    if metadata.model.fingerprint != shape.fingerprint:
        raise OptionError(f"kvplug.scores: {path} was made for {metadata.model.name}, which has another architecture")
    if scores.ndim != 3 or scores.shape[:2] != (shape.layers, shape.kv_heads):
        needed = f"[{shape.layers}, {shape.kv_heads}, tokens]"
        raise OptionError(f"kvplug.scores: {path} has scores of shape {list(scores.shape)} where {needed} is needed")
    if scores.dtype not in (torch.float16, torch.float32) or not scores.isfinite().all():
        raise OptionError(f"kvplug.scores: {path} must hold finite float16 or float32 numbers")
    return scores.float()


# ---------------------------------------------------------------- the policy
class OracleConfig(PolicyConfig):
    request_knob = "ratio"

    scores: str | None = Field(
        default=None, description="Folder of the files of scores that requests name with kvplug.scores."
    )
    ratio: float = Field(
        default=0.3, gt=0, le=1, description="Share of the prompt that heads keep on average, the window counted in."
    )
    window: float = Field(
        default=0.02, ge=0, le=1, description="Last tokens that are always kept, at least one: a share of the prompt."
    )
    allocation: AllocationKnob = "joint"


class Oracle(Policy[OracleConfig]):
    """A budget that all heads share, cut once; a token's score is what the model itself found, and no guess.

    Scheduler and workers read a request's file each for itself, and so know alike how many tokens every head keeps.
    A request for which nothing is dropped needs no file.
    """

    name = "oracle"
    Config = OracleConfig

    def __init__(self, config: OracleConfig, shape: ModelShape):
        super().__init__(config, shape)
        if config.scores is None or not Path(config.scores).is_dir():
            found = "no folder" if config.scores is None else f"{config.scores}, which is no folder,"
            raise PolicyError(f"oracle: {found} of scores in {CONFIG_FLAG}: give it as '{{\"scores\": FOLDER}}'")

    def check_prompt(self, prompt_len: int) -> None:
        if self.options.off:
            return
        scored = None if self._scores is None else self._scores.shape[1]
        if scored is None and self.config.ratio < 1:
            raise OptionError("policy 'oracle' needs the name of the prompt's file of scores as kvplug.scores")
        if scored not in (None, prompt_len):
            raise OptionError(f"kvplug.scores: the file has scores of {scored} tokens, {prompt_len} are to be cut")

    @property
    def _scores(self) -> torch.Tensor | None:
        """float32 [layers * KV heads, tokens] of the request's file."""
        folder, name = self.config.scores, self.options.scores
        return None if folder is None or name is None else load_scores(Path(folder), name, self.shape).flatten(0, 1)

    def _cuts(self, prompt_len: int) -> Cuts:
        """The one cut that there is, with the totals that `fastkvzip` would have."""
        config, window = self.config, share_of(self.config.window, prompt_len)
        cuts = Cuts.of_ratio(prompt_len, prompt_len, window, config.ratio, allocation=config.allocation)
        # A request that is computed again has its answer so far behind what was scored, and keeps it.
        scored = prompt_len if self._scores is None else self._scores.shape[1]
        answered = [(scored, prompt_len)] if scored < prompt_len else []
        return replace(cuts, protect=self.options.protecting(*answered).protect)

    def _ranked(self, cuts: Cuts) -> torch.Tensor:
        """Scores of a prompt, float32 [layers * KV heads, tokens], +inf for what always stays.

        Without a file, as plans are made for requests yet to come, tokens are all alike.
        """
        tokens, scores = cuts.prefill_end, self._scores
        ranked = torch.full((self.shape.heads, tokens), torch.inf)
        judged = ranked[:, : cuts.judged(tokens)]
        judged[:] = 0
        if scores is not None:
            both = min(judged.shape[1], scores.shape[1])
            judged[:, :both] = scores[:, :both]
        for start, end in cuts.protect:
            judged[:, start:end] = torch.inf
        return ranked

    def kept(self, prompt_len: int) -> Kept:
        layers, heads, cuts = self.shape.layers, self.shape.heads, self._cuts(prompt_len)
        judged, total = cuts.judged(prompt_len), cuts.kept(prompt_len, heads)
        groups = {"joint": 1, "layer": layers, "uniform": heads}[cuts.allocation]
        own = cuts.own(prompt_len, total, heads)
        chosen = top_shared(self._ranked(cuts)[:, :judged], even_parts(total, groups), own)
        return (chosen.sum(1) + (prompt_len - judged)).view(layers, -1).tolist()

    def score(self, view: PromptView) -> torch.Tensor:
        first = view.layer * self.shape.kv_heads
        scores = self._ranked(self._cuts(view.keys.shape[1]))[first + view.heads.start : first + view.heads.stop]
        return scores.to(view.keys.device, non_blocking=True)
