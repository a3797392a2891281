// Package failpoint ends or delays the process at named places, so that tests
// can show what a crash there leaves behind.
//
// Without the build tag failpoints there is nothing of it in the program: Hit is
// empty and inlined away. With the tag, the environment variable
// CRUST_FAILPOINTS says what happens where, as a comma separated list:
//
//	stage-recorded=kill          SIGKILL to this process
//	stage-recorded@3=kill        the same, at the third hit
//	stage-recorded=sleep:100ms   wait, at each hit
package failpoint
