// Package admission tries what deploy/ ships on a real API server: the chart as it is
// installed, and each manifest as it is applied. It needs no node and no root.
package admission
