"""Answer questions of CLRS-Text: models trained or fine-tuned on small problems and tested on larger ones."""
