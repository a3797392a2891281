package cluster

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Namespace is where tests make their objects.
const Namespace = "default"

// Kube is the shared cluster in the hands of one test: what fails, fails the test,
// and what the test makes goes with it.
type Kube struct {
	*Cluster
	T rig.T
}

// On gives the shared cluster to a test. When the test has ended, everything is started again that it has stopped,
// crust-proxy has its default settings, and nothing may be left of pods and volumes: so only one such test runs at a
// time. Parts of it that run in parallel use For.
func On(t rig.T) *Kube {
	t.Helper()
	k := &Kube{Cluster: Shared(t), T: t}
	t.Cleanup(func() {
		failed := t.Failed()
		if failed {
			t.Log(k.Logs())
		}
		if err := k.Mend(); err != nil {
			if !failed {
				t.Log(k.Logs())
			}
			giveUp(err)
			k.Must(err)
		}
		k.check(k.WantNothingLeft())
		k.check(k.ConfigureProxy(k.DefaultProxy()))
	})
	return k
}

// Beside gives the shared cluster to a test that takes nothing away and changes no settings. It
// runs together with the others of its kind, after all tests that have the cluster alone.
func Beside(t *testing.T) *Kube {
	t.Helper()
	t.Parallel()
	return &Kube{Cluster: Shared(t), T: t}
}

// For gives the cluster to a part of the test, such as a subtest.
func (k *Kube) For(t rig.T) *Kube { return &Kube{Cluster: k.Cluster, T: t} }

// Mend starts everything that does not run.
func (c *Cluster) Mend() error {
	// In this order, for one needs the other.
	all := c.Components()
	for _, name := range []string{"etcd", "apiserver", "controllers", "scheduler", "containerd", Block, Native, Plain, "crust-proxy", "kubelet"} {
		if one := all[name]; one != nil && !one.Alive() {
			one.Kill() // forget what ended by itself
			if err := one.Start(); err != nil {
				return err
			}
		}
	}
	return errors.Join(c.waitDrivers(), c.mendSidecars())
}

// Must fails the test at an error.
func (k *Kube) Must(err error) {
	k.T.Helper()
	check.Must(k.T, err)
}

// check has the test fail and go on.
func (k *Kube) check(err error) {
	k.T.Helper()
	check.That(k.T, err == nil, "%v", err)
}

// Eventually asks until there is no error, or fails the test.
func (k *Kube) Eventually(what string, try func(context.Context) error) {
	k.T.Helper()
	k.Must(eventually(what, try))
}

// Settings restarts crust-proxy with other settings, until the test has ended.
func (k *Kube) Settings(settings ProxySettings) {
	k.T.Helper()
	k.Must(k.ConfigureProxy(settings))
}

type collection[T metav1.Object] interface {
	Get(ctx context.Context, name string, options metav1.GetOptions) (T, error)
	Delete(ctx context.Context, name string, options metav1.DeleteOptions) error
}

// removed asks for the end of an object until that is accepted, and waits until it has gone.
// Another one of its name is not waited for where the options tell its UID.
func removed[T metav1.Object](what, name string, all collection[T], options metav1.DeleteOptions) error {
	asked := false
	return eventually(what+" "+name+" goes", func(ctx context.Context) error {
		if !asked {
			if err := all.Delete(ctx, name, options); ignoreGone(err) != nil && !apierrors.IsConflict(err) {
				return err
			}
			asked = true
		}
		is, err := all.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return ignoreGone(err)
		}
		if options.Preconditions != nil && is.GetUID() != *options.Preconditions.UID {
			return nil
		}
		return errors.New("it is there")
	})
}

func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Patience is how long things may take that a cluster does by itself. It is far
// more than they do take: kubelet's pauses after errors grow to two minutes.
var Patience = 3 * time.Minute

// eventually asks again and again until there is no error.
func eventually(what string, try func(context.Context) error) error {
	err := check.Until(Patience, 150*time.Millisecond, func() error { return try(context.Background()) })
	if err != nil {
		return fmt.Errorf("%s: not within %v: %w", what, Patience, err)
	}
	return nil
}
