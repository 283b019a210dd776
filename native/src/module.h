/* What module.c and module_gate.c share: the Python API, whichever header it comes from, and the functions to bind. */
#ifndef WH_MODULE_H
#define WH_MODULE_H

#if defined(WH_WITHOUT_PYTHON_H)
#include "stable_abi.h"
#else
#if !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#endif

#define OPS_CAPSULE "whetherman_edge.kernels.ops"

/* module_gate.c; bound to a row of kernels, like those of module.c. */
PyObject *wordpiece_index_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *wordpiece_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *token_fields(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *tool_rows_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *text_record_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *ngram_fields_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *gate_forward(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
