// Package prometheus holds tests of deploy/monitoring by Prometheus' own code: its
// parser, and its engine for rules. It is a module of its own, since these bring
// hundreds of requirements that the product shall not have.
package prometheus
