// Python objects whose classes have slots, for native passes that read and make them. See native.py: extension.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

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

// The place of an attribute, by the offset of its slot.
inline PyObject*& slot(PyObject* node, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(node) + offset);
}

// Steals a reference to the value.
inline void put(PyObject* node, Py_ssize_t offset, PyObject* value) {
  PyObject*& at = slot(node, offset);
  PyObject* old = at;
  at = value;
  Py_XDECREF(old);
}

// Offset of a slot; -1 after an error.
inline Py_ssize_t offset_of(PyObject* descriptor) {
  if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
    PyErr_SetString(PyExc_TypeError, "an attribute is no slot");
    return -1;
  }
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
  if (member->type != T_OBJECT_EX) {
    PyErr_SetString(PyExc_TypeError, "a slot holds no object");
    return -1;
  }
  return member->offset;
}

// Sets the offsets of slots. False after an error.
struct Slot {
  PyTypeObject* type;
  const char* name;
  Py_ssize_t& offset;
};
inline bool find(std::initializer_list<Slot> slots) {
  for (const Slot& each : slots) {
    Ref descriptor(PyObject_GetAttrString(reinterpret_cast<PyObject*>(each.type), each.name));
    if (!descriptor || (each.offset = offset_of(descriptor.get())) < 0) return false;
  }
  return true;
}

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
