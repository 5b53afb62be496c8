"""Experiments that train a grid of small language models, which differ in one or two settings.

grid.py                            train and measure the models of a plan, statistics over their records; several
                                   processes may share a folder
temperature.py, positions.py, heads.py   one experiment each: its models, findings and figure
"""
