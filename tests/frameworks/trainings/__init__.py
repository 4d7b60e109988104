"""Small trainings, each with a package that people really train with.

Each module has `train`, which trains a model and returns it. `prepare` writes the data that it reads into a folder, with
one corrupt sample in it. Data and models are made here: nothing is fetched from anywhere.
"""
