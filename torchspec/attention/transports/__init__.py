"""How keys and values meet queries on other ranks."""
