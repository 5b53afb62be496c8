"""What the theory's claims look like to a reader: tables, figures and the page of docs/theory.md."""
