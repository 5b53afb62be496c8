"""Adaptive temperature of Velickovic et al. 2024 on the rows of real heads."""
