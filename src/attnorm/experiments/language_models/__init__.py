"""Language models that differ only in their normalizer, trained and tested under equal conditions.

    workspace      the plan, and a folder that several processes share: texts as tokens, claimed work, results
    train          the fastest way to compute attention, short runs that choose the learning rate, the main runs
    stages         all of the work in order, resumable, under a time limit; loss at 1, 2 and 4 times the training
                   length, pass keys and attention statistics of a trained model
    results        one record per model, mean over its seeds, and tables of them
    figure, experiment   what `attnorm reproduce language-models` draws and concludes

Training and measuring import neither pyarrow nor matplotlib.
"""
