"""The room that touches Hugging Face models: load them, watch their attention, exchange its normalizer."""
