"""Recovery: jobs whose ranks are killed, and calls under ULFM."""
