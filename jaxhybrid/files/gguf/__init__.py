"""GGUF files (llama.cpp's format), presented as what a Hugging Face folder is to this package.

`GgufFiles` gives the tensors of a file under the names of the family's folder, `config_of` its metadata as a
config.json; so families and the loader know nothing of the format. `write_gguf` reads the same tables the
other way. Needs the gguf package: pip install "jaxhybrid[gguf]".
"""
