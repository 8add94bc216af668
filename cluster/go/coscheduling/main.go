// Command coscheduling is kube-scheduler with the plugin of scheduler-plugins that schedules pod groups.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme"
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"
)

func main() {
	plugin := app.WithPlugin(coscheduling.Name, coscheduling.New)
	os.Exit(cli.Run(app.NewSchedulerCommand(plugin)))
}
