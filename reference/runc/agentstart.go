package runc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/cgroup"
)

// controlGroup is that of the agent and of the watchdogs of frozen volumes. They serve
// all pods of the node: they must not end, or be stopped, with the control group of
// the pod whose container happened to start them.
const controlGroup = "crust-runc"

// startAgent starts an agent where none answers. It is not waited for: the broker
// runs the program until the agent serves. An agent that could not be isolated when it
// was started, or is of an older version, is now.
func startAgent(cfg Config) error {
	conn, err := net.DialTimeout("unix", cfg.AgentSocket(), time.Second)
	if err == nil {
		defer func() { _ = conn.Close() }()
		agent, err := sys.Peer(conn)
		if err != nil {
			return err
		}
		return isolateAgent(int(agent.Pid))
	}
	cmd := exec.Command(cfg.AgentProgram) //nolint:gosec // by our own configuration
	cmd.Dir = "/"
	cmd.Env = childEnvironment()
	// Neither the container's streams nor its console may be kept open by it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		// The program answers as well; it takes longer.
		return fmt.Errorf("no agent could be started: %w", err)
	}
	return errors.Join(isolateAgent(cmd.Process.Pid), cmd.Process.Release())
}

func isolateAgent(pid int) error {
	if err := cgroup.Move(pid, controlGroup); err != nil {
		return fmt.Errorf("the agent has no control group of its own, and may end with a pod's: volumes that are frozen then "+
			"are thawed by crust-proxy when their time is over: %w", err)
	}
	return nil
}

// childEnvironment is what our own processes need to find the same configuration.
func childEnvironment() []string {
	env := []string{"PATH=" + os.Getenv("PATH")}
	if file := os.Getenv(configVariable); file != "" {
		env = append(env, configVariable+"="+file)
	}
	return env
}
