"""Language models that differ only in their normalizer, trained and tested under equal conditions.

    plan           what is run: sizes, tokens, learning rates, seeds
    workspace      a folder that several processes share: texts as tokens, claimed work, one line per result
    train          short runs that choose the learning rate, and the main runs
    evaluate       loss at 1, 2 and 4 times the training length, pass keys, attention statistics
    engine_choice  which way to compute attention trains fastest on this machine
    stages         all of it in order, resumable, under a time limit
    results        one record per model, mean over its seeds
    tables, figure, experiment   what `attnorm reproduce language-models` prints, draws and concludes

Training and measuring import neither pyarrow nor matplotlib.
"""
