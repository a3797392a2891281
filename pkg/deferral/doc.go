// Package deferral defers volumes: it validates an instruction, claims the device,
// writes the record, guards the target, and has a runtime handler publish the volume;
// and it undoes all of that in the opposite order.
//
// Package claim has the first of these steps, and package guard the third. This package
// has the records, and the order.
//
// It knows no gRPC and no runtime. Runtime handlers are reached through the small
// Projector interface. It is for this project's daemon; nothing in it is promised to
// others.
package deferral
