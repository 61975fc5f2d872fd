"""Who is asked: this project's models, transformers', endpoints; and how answers are computed."""
