"""The plan of a small search."""

PLAN = """
objectives = ["loss", "loss at 4x"]
trials = 4
[space]
groups = "each"
normalizers = ["softmax", "entmax"]
learning_rate = [0.003, 0.03]
[space.options.entmax]
alpha = [1.1, 1.9]
[options]
texts = ["train.txt"]
valid = "valid.txt"
architecture = "llama"
layers = 2
heads = 2
width = 16
context = 16
vocab = 300
steps = 4
batch = 4
warmup = 2
eval_every = 2
"""
