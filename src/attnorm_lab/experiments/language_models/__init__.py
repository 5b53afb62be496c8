"""Language models that differ only in their normalizer, trained and tested under equal conditions.

    train          the plan, short runs that choose the learning rate, the main runs
    stages         all of the work in order, resumable, under a time limit: the fastest way to compute attention; loss
                   at 1, 2 and 4 times the training length, pass keys and attention statistics of a trained model
    results        one record per model, mean over its seeds, and tables of them
    figure, experiment   what `attnorm lab reproduce language-models` draws and concludes

The folder that several processes share, with texts and results, is in experiments/trained_models.py.

Training and measuring import neither pyarrow nor matplotlib.
"""
