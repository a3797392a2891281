package cluster

import (
	"context"
	"path/filepath"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/crust-proxy/crust-proxy/test/deploy/render"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// chartSpace is the namespace of what the chart makes.
const chartSpace = "crust-proxy"

// deployment runs the sidecars with the flags and the accounts that they have as pods of a cluster.
type deployment struct {
	k *Kube
	// programs is the directory of the sidecars.
	programs string
}

// layOut prepares the sidecars of drivers as the chart runs them, and upstream's snapshot-controller.
func (d *deployment) layOut(drivers []string) {
	d.k.T.Helper()
	_, err := d.k.Kubectl("apply", "--filename="+d.programs+"/rbac-snapshot-controller.yaml")
	d.k.Must(err)
	d.add("snapshot-controller", "snapshot-controller", d.account("kube-system", "snapshot-controller"))
	pod := d.driverPod()
	access := d.account(chartSpace, pod.ServiceAccountName)
	for _, driver := range drivers {
		for _, sidecar := range pod.Containers {
			if sidecar.Name != "crust-driver" {
				args := append(slices.Clone(sidecar.Args), "--csi-address="+d.k.Drivers[driver].Socket)
				d.add(sidecar.Name, sidecar.Name+"-of-"+driver, access, args...)
			}
		}
	}
}

func (d *deployment) add(program, name, access string, args ...string) {
	p := d.k.process(name, append(args, "--kubeconfig="+access, "--retry-interval-start=100ms", "--v=2")...)
	p.Program = filepath.Join(d.programs, program)
	d.k.sidecars = append(d.k.sidecars, p)
}

// driverPod makes the account and the rights that the chart gives the pod of crust-driver, and gives that pod.
func (d *deployment) driverPod() *corev1.PodSpec {
	d.k.T.Helper()
	part := func(name string) string {
		return render.Template(d.k.T, "--show-only=templates/crust-driver/"+name+".yaml", "--set=crustDriver.enabled=true,crustDriver.node="+NodeName)
	}
	d.k.Must(d.k.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: " + chartSpace + "}}\n---\n" + part("rbac")))
	set := &appsv1.StatefulSet{}
	d.k.Must(runtime.DefaultUnstructuredConverter.FromUnstructured(render.Objects(d.k.T, part("statefulset"))[0].Object, set))
	return &set.Spec.Template.Spec
}

// account makes a kubeconfig with a token of a service account, and gives its path.
func (d *deployment) account(namespace, name string) string {
	d.k.T.Helper()
	d.k.Eventually("the rights of "+name+" are in force", func(context.Context) error {
		_, err := d.k.Kubectl("auth", "can-i", "list", "persistentvolumes", "--as=system:serviceaccount:"+namespace+":"+name)
		return err
	})
	made, err := d.k.Client.CoreV1().ServiceAccounts(namespace).CreateToken(
		d.k.T.Context(), name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	d.k.Must(err)
	path, err := d.k.kubeconfig(namespace+"-"+name, &api.AuthInfo{Token: made.Status.Token})
	d.k.Must(err)
	return path
}

// end ends the sidecars, and has the test fail where one lacked a right: it may have gone on without.
func (d *deployment) end() {
	for _, p := range d.k.sidecars {
		for line := range strings.Lines(p.Log()) {
			if strings.Contains(line, "is forbidden: User") {
				d.k.T.Errorf("%s: %s", p.Name, line)
				break
			}
		}
		if d.k.T.Failed() {
			d.k.T.Logf("log of %s:\n%s", p.Name, rig.Tail(p.Log()))
		}
		p.Kill()
	}
	d.k.sidecars = nil
}
