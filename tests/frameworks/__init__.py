"""Jobs of two ranks in which a framework trains, each a program of this folder, and what they must print."""
