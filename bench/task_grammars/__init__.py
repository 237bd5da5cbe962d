"""Long-context tasks, generated: one file per family, as text and as tokens of the retrieval model."""
