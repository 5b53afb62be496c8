"""CLRS-Text with one normalizer in all heads, trained on small problems and tested on larger ones.

    plan           which models are trained, in which order
    work           train and test the missing ones under a time limit; one JSON line per finished model
    results        exact matches with intervals, paired tests against softmax
    figure, experiment   what `attnorm reproduce clrs-text` draws and concludes

Plan and work import neither pyarrow nor matplotlib.
"""
