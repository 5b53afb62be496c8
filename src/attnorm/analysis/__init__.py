"""analyze(): a model and a text become tables about every head, which can be saved, resumed, merged and read again."""
