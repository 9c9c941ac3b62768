"""Where the time goes: the machine's own peaks, a clock around every operator, what bounds each."""
