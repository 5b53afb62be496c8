"""The logit spread of real heads, next to the printed table and Proposition 3.1 of Velickovic et al. 2024."""
