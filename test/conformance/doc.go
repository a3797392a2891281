// Package conformance tests crust-conformance with our handler, with runc, and with handlers that do one thing wrong.
package conformance
