"""Language models that differ only in their normalizer, trained and tested under equal conditions.

workspace      the plan, and a folder that several processes share: texts as tokens, claimed work, results
train          the fastest way to compute attention, short runs that choose the learning rate, the main runs
evaluate       loss at 1, 2 and 4 times the training length, pass keys, attention statistics
results        one record per model, mean over its seeds, and tables of them
figure         the figures
experiment     what `attnorm reproduce language-models` runs, in resumable stages, and what it concludes
"""
