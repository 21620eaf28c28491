"""What a person writes: recipes, validated at once and in one place. Imports pydantic and the standard library only."""
