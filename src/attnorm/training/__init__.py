"""Small trainers that one person can read: text in, a standard Hugging Face folder out."""
