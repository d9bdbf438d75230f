"""Random steps of two threads on one group, its works, a future, and its close."""
