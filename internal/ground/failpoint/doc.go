// Package failpoint kills or delays the process at named points, so that tests can show
// what a crash there leaves behind.
//
// Without the build tag failpoints, Hit is empty and inlined away. With the tag, the
// environment variable CRUST_FAILPOINTS is a comma-separated list of points and actions:
//
//	stage-recorded=kill          SIGKILL to this process
//	stage-recorded@3=kill        the same, at the third hit
//	stage-recorded=sleep:100ms   wait, at each hit
package failpoint
