// Package volume has the types that the parts of crust-proxy share: a volume and its
// key, the instruction that it was made from, its device, what a sandbox reports about
// it, and the kinds of errors. It imports only the standard library.
//
// It is for authors of runtime handlers, who get a *Volume for each call. Its types
// only gain fields; a field that is gone would be a new major version.
package volume
