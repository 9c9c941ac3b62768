"""Other ways to serve a model, timed beside rankopt's artifact in one interleaved run."""
