"""The numbers of Velickovic et al. 2024 (https://arxiv.org/abs/2410.01104), Table 1, and the goals set beside them."""

SIZES = (16, 64, 256, 1024, 4096, 16_384)
BASELINE = dict(zip(SIZES, (98.6, 94.3, 81.3, 53.8, 22.6, 12.4), strict=True))  # % right
ADAPTIVE = dict(zip(SIZES, (98.6, 94.5, 82.1, 57.7, 24.9, 14.0), strict=True))
P = dict(zip(SIZES, (0.4, 2e-3, 2e-4, 1e-4, 0.02, 4e-3), strict=True))  # of their paired t-tests over ten seeds
GOALS = {1024: 79.0, 4096: 50.0, 16_384: 28.0}  # half of the published error at 1024, and more beyond
