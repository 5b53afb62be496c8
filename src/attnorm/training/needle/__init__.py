"""Fine-tune a language model to find pass keys in its context, and count the keys it finds at longer lengths."""
