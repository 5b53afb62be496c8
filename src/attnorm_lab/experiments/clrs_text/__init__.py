"""CLRS-Text with one normalizer in all heads, trained on small problems and tested on larger ones.

    workspace      which models are trained, in which order; train and test the missing ones under a time limit
    results        exact matches with intervals, paired tests against softmax
    experiment     what `attnorm lab reproduce clrs-text` concludes and draws

The workspace imports neither pyarrow nor matplotlib.
"""
