"""Small language models that differ in one or two settings, trained and measured alike.

grid           the models of a plan, trained and measured one after another; several processes may share a folder
summary        mean and interval over seeds of what the records hold
temperature, positions, heads   one experiment each: its models, its question, its answer
"""
