/* The part of CPython's stable ABI (3.11) that module.c uses, for machines with a compiler but without Python.h.
 *
 * Debian's python3 comes without its headers (they are in python3-dev), and a sidecar should not need them: the stable
 * ABI promises that these names, signatures and layouts stay as they are for all of Python 3. Where Python.h exists it
 * is used, and tests/test_native_abi.py builds the module both ways and compares.
 * Sources: https://docs.python.org/3/c-api/stable.html and Misc/stable_abi.toml of CPython 3.11. */
#ifndef WH_STABLE_ABI_H
#define WH_STABLE_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef intptr_t Py_ssize_t;
typedef struct _typeobject PyTypeObject;
typedef struct _object {
    Py_ssize_t ob_refcnt;
    PyTypeObject *ob_type;
} PyObject;

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef struct PyMethodDef {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;
#define METH_NOARGS 0x0004
#define METH_O 0x0008
#define METH_FASTCALL 0x0080

typedef struct PyModuleDef_Base {
    PyObject ob_base;
    PyObject *(*m_init)(void);
    Py_ssize_t m_index;
    PyObject *m_copy;
} PyModuleDef_Base;
typedef struct PyModuleDef_Slot {
    int slot;
    void *value;
} PyModuleDef_Slot;
#define Py_mod_exec 2
typedef struct PyModuleDef {
    PyModuleDef_Base m_base;
    const char *m_name;
    const char *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    PyModuleDef_Slot *m_slots;
    void *m_traverse;
    void *m_clear;
    void *m_free;
} PyModuleDef;
#define PyModuleDef_HEAD_INIT {{1, NULL}, NULL, 0, NULL}
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *

typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len;
    Py_ssize_t itemsize;
    int readonly;
    int ndim;
    char *format;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    Py_ssize_t *suboffsets;
    void *internal;
} Py_buffer;
#define PyBUF_SIMPLE 0
#define PyBUF_WRITABLE 0x0001
#define PyBUF_FORMAT 0x0004
#define PyBUF_ND 0x0008

extern PyObject *PyExc_TypeError;
extern PyObject *PyExc_ValueError;

void Py_DecRef(PyObject *);
int PyObject_GetBuffer(PyObject *, Py_buffer *, int);
void PyBuffer_Release(Py_buffer *);
PyObject *PyErr_Format(PyObject *, const char *, ...);
void PyErr_Clear(void);
PyObject *PyErr_Occurred(void);
unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
PyObject *PyLong_FromSsize_t(Py_ssize_t);
const char *PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *);
PyObject *PyUnicode_FromString(const char *);
PyObject *Py_BuildValue(const char *, ...);
PyObject *PyDict_New(void);
double PyFloat_AsDouble(PyObject *);
PyObject *PyFloat_FromDouble(double);
PyObject *PyTuple_New(Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
int PyDict_SetItemString(PyObject *, const char *, PyObject *);
PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
void *PyCapsule_GetPointer(PyObject *, const char *);
PyObject *PyCMethod_New(PyMethodDef *, PyObject *, PyObject *, PyTypeObject *);
PyObject *PyModuleDef_Init(PyModuleDef *);
int PyModule_AddObjectRef(PyObject *, const char *, PyObject *);

#endif
