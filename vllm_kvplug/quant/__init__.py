"""HIGGS: vector quantisation of keys and values on Gaussian grids (YAKV, arXiv 2604.08426). Knows nothing of vLLM."""
