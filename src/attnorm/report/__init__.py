"""What a person sees: terminal tables and figures. Each file holds the record it shows next to the way it shows it."""
