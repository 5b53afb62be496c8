"""Everything that `attnorm lab bench` promises and judges; the exit code is 1 if a promise is missed."""

# The least speedup over what is named.
SPEEDUPS: dict[str, float] = {
    "entmax, forward": 4.0, "entmax, forward + backward": 3.0, "entmax, forward, compiled": 10.0,
    "softmax": 1 / 1.15, "ssmax": 1 / 1.15, "log_scaled": 1 / 1.15,  # of torch SDPA on a CPU
    "adaptive_temperature, torch SDPA": 1 / 2.5, "adaptive_temperature, its eager form": 4.0,
    "analyze, core": 1 / 4, "analyze, full": 1 / 2, "analyze, default": 1 / 2,  # of the plain pass on a CPU
    "analyze, eager": 4.0,  # the core, of output_attentions=True
    "analyze, three normalizers": 1 / 3,  # of one
    "statistics": 1 / 1.2, "output and statistics": 1 / 2,  # of cuDNN attention
    "one call": 1.0,  # output and statistics in one call, of two calls
    "decoding": 1 / 1.5,
    "training": 0.8,  # of softmax
    "monitor": 1 / 1.01,  # of the step without, at the default setting
}  # fmt: skip

# The most of other numbers.
LIMITS: dict[str, dict[str, float]] = {
    "memory": {"forward_mb": 400.0, "backward_mb": 400.0},
    "analyze, core": {"times_plain": 1.5},
    "analyze, full": {"times_plain": 1.5},
    "analyze, growth": {"power": 1.1},  # an attention matrix has 2
    "analyze, whole run": {"seconds": 60.0},
    "first call": {"seconds": 10.0},
    "sweep": {"times_ideal": 1.3, "overhead_per_item_s": 1.0},
}

FLASH, CUDNN, FLEX = "flash softmax", "cuDNN softmax", "flex softmax"
ADASPLASH = "adasplash2's entmax15"  # adasplash has version 2 for alpha = 1.5 only
ENTMAX15 = "entmax15"
Speedups = tuple[float | None, float | None]  # the least, forward and with backward
UNPROMISED: Speedups = (None, None)
TFLOPS = 170.0  # the least, forward, of what is compared with adasplash2

# On CUDA everything is compared with softmax on flash and on cuDNN, and with the rivals of this table.
ATTENTION: dict[str, dict[str, Speedups]] = {
    "softmax": {CUDNN: (0.9, 0.9), FLEX: UNPROMISED},
    "ssmax": {CUDNN: (0.9, 0.9)},
    "log_scaled": {CUDNN: (0.9, 0.9)},
    "sink": {FLASH: (0.7, 0.7)},
    "softmax1": {FLASH: (0.7, 0.7)},
    "sigmoid": {FLASH: (0.7, 0.7)},
    "relu": {FLASH: (0.7, 0.7)},
    "softpick": {FLASH: (0.7, 0.7)},
    "scale_invariant": {FLASH: (0.7, 0.7)},
    "kernel:function=exp": {FLASH: (0.7, 0.7)},
    "kernel": {},
    "adaptive_temperature": {FLASH: (0.45, 0.35)},
    "sa_softmax": {FLASH: (0.4, 0.4)},
    "stick_breaking": {FLASH: (0.4, 0.4)},
    "entmax15": {ADASPLASH: (1.3, 1.2)},
    "sparsemax": {ADASPLASH: (1.3, 1.2)},
    "asentmax": {ADASPLASH: (1.3, 1.2)},
    "kneemax": {ENTMAX15: (0.7, 0.7)},
    "entmax:alpha=1.3": {ENTMAX15: (0.7, 0.7)},
    "topk": {ENTMAX15: (0.7, 0.7)},
}
EMPTY_TILES: dict[str, dict[str, Speedups]] = {
    "entmax15": {FLASH: (1.0, None), CUDNN: (None, 1.0)},
    "sparsemax": {FLASH: (1.0, None), CUDNN: (None, 1.0)},
}

# analyze() on CUDA by way and tokens: at most so many ms more than the plain pass, or so many times its time.
ANALYZE: dict[str, dict[int, tuple[float, float]]] = {
    "core": {2048: (300, 1), 8192: (300, 1), 32_768: (0, 6), 131_072: (0, 2.5)},
    "core of 7B": {32_768: (0, 1.5)},
    "full": {2048: (1000, 1), 8192: (1000, 1), 32_768: (2000, 1)},
}
GPU_MEMORY = (1.5, 2**30)  # the core: at most so many times the memory of the plain pass, and so many bytes more


def least_speedup(way: str, tokens: int, plain_ms: float) -> float | None:
    """Return the promised speedup over the plain pass, given its time."""
    if tokens not in ANALYZE.get(way, {}):
        return None
    more_ms, times = ANALYZE[way][tokens]
    return plain_ms / max(plain_ms + more_ms, times * plain_ms)
