// Python objects in native functions. See native.py: extension.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <initializer_list>

namespace paceline {

// An owned reference; null after an error.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  void reset(PyObject* object) {
    PyObject* old = object_;
    object_ = object;
    Py_XDECREF(old);
  }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Makes the strings of names. False after an error.
struct Name {
  PyObject*& object;
  const char* text;
};
inline bool intern(std::initializer_list<Name> names) {
  for (const Name& each : names)
    if ((each.object = PyUnicode_InternFromString(each.text)) == nullptr) return false;
  return true;
}

// A method whose arguments come as an array.
using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
inline PyMethodDef method(const char* name, Fast function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

}  // namespace paceline
