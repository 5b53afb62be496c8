"""Small trainers: language models (lm), pass keys (needle), picking from sets (retrieval), CLRS-Text (clrs), images
(vision).

Each has a folder, except pass keys (needle.py, pass_keys.py). All use device.py; lm, clrs and
retrieval also use checkpoints.py.
"""
