"""Hugging Face models: load them, observe their attention calls, replace their normalizer, save and restore it."""
