"""Present the claims of the theory: terminal tables, figures, and the page docs/theory.md."""
