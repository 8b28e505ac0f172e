"""Changes of the tables, each once. One that a release has shipped is never edited."""
