"""The papers' figures and tables: each experiment measures a model and judges claims.

One folder per experiment, or one file where that is short:

    experiment   the run and its `EXPERIMENT`; the findings too, where they have no file of their own
    measure      the numbers, and the dataclass that holds them
    findings     what the numbers say about each claim
    figure       the pictures that a paper or a page of docs has

`catalogue` lists the experiments, `run` executes them and writes the results, `subject` is what they run on.
"""
