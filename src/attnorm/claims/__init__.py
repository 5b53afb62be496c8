"""Present the claims of the theory: terminal tables, figures, and the table of the site."""
