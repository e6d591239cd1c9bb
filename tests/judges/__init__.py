"""Judges that tests share and that run alone for longer: fuzzers of the API and of grammars, agents' sessions."""
