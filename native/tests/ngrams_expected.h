/* hash_ngrams(b"Ab c\xc3\xa9", seed=7, n_buckets=2**20) by kernels/reference.py; included by test_kernels.c. */
826451, 7347, 600095, 710700, 542123, 526329, 246701, 703256, 226806,
